"""How the world asks: the Serve app, the OpenAI interface, the router. ``serve run deployments:app`` starts it."""

from deployments.build import app as app

__all__ = ["app"]
