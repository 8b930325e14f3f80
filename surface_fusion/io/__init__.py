"""Files: atomic writes, and text files read line by line."""
