"""What the `ladder` command does: one file a command, and what several of them share."""
