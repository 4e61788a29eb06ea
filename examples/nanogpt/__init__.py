"""A GPT in the form of nanoGPT, made parallel by plan="auto"."""
