"""Files of rows: which files a path names, what they contain, and how they are written."""
