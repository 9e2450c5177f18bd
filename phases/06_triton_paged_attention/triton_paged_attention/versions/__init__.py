"""The decode kernel's first three versions, each a repair of the one before. Version 4 is `decode.py`."""
