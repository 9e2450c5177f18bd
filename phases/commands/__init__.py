"""The commands of `ladder`: one file a command, and the code that several of them share."""
