"""Axo as a strategy of Lightning Fabric."""
