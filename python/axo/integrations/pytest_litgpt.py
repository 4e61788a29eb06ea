"""The name that docs give the pytest plugin (``pytest -p axo.integrations.pytest_litgpt``)."""

pytest_plugins = ["axo.integrations.litgpt.pytest_plugin"]
