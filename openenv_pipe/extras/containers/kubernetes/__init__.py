"""Host `kubernetes`: environment servers in pods."""
