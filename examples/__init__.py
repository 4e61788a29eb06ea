"""Studies that use Axo as anybody would; each folder has a README."""
