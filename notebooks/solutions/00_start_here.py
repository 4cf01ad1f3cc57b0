"""Solutions to the exercise of notebook 00."""


def characters_per_token(tokenizer, text: str) -> float:
    """Length of the text over the number of its tokens."""
    return len(text) / len(tokenizer.encode(text))
