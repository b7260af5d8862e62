"""The router: HTTP in front, workers behind; text and JSON end here, workers speak token ids."""
