"""Bytes from one node's memory to another's; see ``base`` for the contract."""
