"""The YAML recipes shipped with Genesis, and the chats that they learn; a package so that they travel in the wheel."""
