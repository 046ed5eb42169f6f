"""Views for people: status, live table, progress."""
