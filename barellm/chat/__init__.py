"""How a model's texts begin and end, and how a conversation becomes a text: special tokens, defaults, chat templates."""
