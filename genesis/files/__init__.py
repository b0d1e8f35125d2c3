"""Files: safe paths, durable writes, locks, trust, caches, safetensors, Hugging Face folders, the hub.

Everything here works on bytes and numpy arrays; `genesis.saving` has the tensors. Import the module you need.
"""
