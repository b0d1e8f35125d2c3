"""The recipes and example chats that ship with Genesis; a package, so that the wheel includes them."""
