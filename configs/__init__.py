"""The YAML recipes shipped with Genesis; a package only so that they travel inside the wheel."""
