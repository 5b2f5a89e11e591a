"""The OpenAI-compatible API: auth → admit → route → relay → settle."""
