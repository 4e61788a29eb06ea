"""Axo inside other people's trainers: Lightning Fabric (``lightning``) and LitGPT (``litgpt``, ``text_data``).

Everything here needs the extra ``axo[litgpt]``; nothing here is imported by ``import axo``.
"""
