"""Reading and writing files: safe paths, durable writes, folder locks, safetensors and Hugging Face folders.

Everything but `objects` works on numpy arrays and the file system alone; models live above. Import the module you need:
`paths`, `filesystem`, `files`, `manifest`, `lock`, `strict_json`, `hashing`, `safetensors`, `hf`, `objects`.
"""
