"""One script a question; each prints a table with the check beside the time and writes JSON lines.

``axo bench NAME`` runs the module of that name as a program. The wheel holds this folder as the package ``axo_bench``,
so modules here import each other relatively.
"""
