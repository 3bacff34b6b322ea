"""What is asked of machines before a job starts on them."""
