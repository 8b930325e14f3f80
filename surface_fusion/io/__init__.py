"""Write files atomically, and read text line by line."""
