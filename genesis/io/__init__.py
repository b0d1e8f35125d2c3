"""Reading and writing files: safe paths, durable writes, folder locks, safetensors and Hugging Face folders.

Everything here works on numpy arrays and the file system alone; tensors and models live above. Import the module you
need: `paths`, `filesystem`, `files`, `manifest`, `lock`, `strict_json`, `hashing`, `safetensors`, `hf`.
"""
