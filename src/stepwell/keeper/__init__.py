"""The keeper: a process that holds what other nodes send, in memory that outlives it."""
