"""What builds, checks and shows the project; nothing here is shipped."""
