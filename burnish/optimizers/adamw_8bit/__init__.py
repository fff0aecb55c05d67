"""AdamW with 8-bit moments, of bitsandbytes."""
