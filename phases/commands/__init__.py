"""The `ladder` command: one file a command, and the code that several of them share."""
