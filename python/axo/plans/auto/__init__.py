"""The plan for any module: what may stay split is proved, what cannot is kept whole and named."""
