"""Other programs' models: Hugging Face folders and llm.c files, both ways."""
