"""What is slow to make and kept for the next process: one class, one rule for what may be read back.

A cache is a folder of our own: made with mode 0700, owned by this user, writable by nobody else, below folders in
which nobody else can exchange it. An entry is one regular file with a single link, owned by this user, with a checksum
over every byte and a structure that is checked (`entry`). Folders and files are opened relative to each other
(`trust`), so that nothing can be exchanged between the check and the use. A folder that breaks the rule is not used:
the process warns once and keeps a private folder, removed at its end. An entry that breaks the rule is rebuilt.

The checksum finds rot. It stops no attacker; owners and modes do.
"""

from genesis.cache.entry import Entry, EntryWriter
from genesis.cache.store import USER, Cache, Cached, State, user_folder
from genesis.cache.trust import private_folder

__all__ = ["USER", "Cache", "Cached", "Entry", "EntryWriter", "State", "private_folder", "user_folder"]
