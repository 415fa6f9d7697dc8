"""Text generation: LMI's schema in all its forms, and OpenAI's. May import what dialects may."""
