"""Small helpers that every layer uses: text for people, waits between attempts, redaction. No input or output."""
