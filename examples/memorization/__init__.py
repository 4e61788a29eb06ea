"""Does a model repeat what it was trained on, and does Goldfish loss keep it from that? See README.md."""
