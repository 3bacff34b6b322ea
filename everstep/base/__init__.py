"""Small helpers that every layer uses: text for people, waits between attempts, hiding of secrets."""
