"""AdamW."""
