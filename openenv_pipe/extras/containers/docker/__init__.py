"""Host `docker`: environment servers in containers."""
