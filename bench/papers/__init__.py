"""The papers' numbers beside the planner's (``axo reproduce papers``), and how the planner was calibrated on them.

`equations` and `tesseract_tables` (what the papers say), `calibrate` (the fit), `figures` and `reproduce` (groups
of `lines`), `report` (tables, plots, one HTML page). The planner itself, ``axo.perf``, needs none of it.
"""
