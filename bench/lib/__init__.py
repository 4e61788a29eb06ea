"""What the scripts of this folder's parent share: tables, arguments, the cases that they time, verdicts."""
