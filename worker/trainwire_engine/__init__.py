"""The process that trains: it loads the model and reports facts over a private channel."""
