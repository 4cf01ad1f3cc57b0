"""Solutions to the exercises of notebook 02."""

from collections.abc import Callable

from rvllm.tokenizer import byte_alphabet


def spelled_to_bytes(text: str) -> bytes:
    """'Ġcaf' -> b' caf'."""
    byte_of = {character: byte for byte, character in byte_alphabet().items()}
    return bytes(byte_of[character] for character in text)


class MyDecoder:
    """push(bytes) returns what is complete."""

    def __init__(self) -> None:
        self.held = b""

    def push(self, data: bytes) -> str:
        self.held += data
        text = ""
        while self.held and len(self.held) >= (length := self._length(self.held[0])):
            text += self.held[:length].decode()
            self.held = self.held[length:]
        return text

    @staticmethod
    def _length(first: int) -> int:
        """The first byte of a character tells how many there are: 0..., 110..., 1110..., 11110..."""
        return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def fit(messages: list[dict], limit: int, count: Callable[[list[dict]], int]) -> list[dict]:
    """The messages that remain, in order; the last one always stays."""
    system = messages[:1] if messages[0]["role"] == "system" else []
    turns = messages[len(system) :]
    while len(turns) > 1 and count([*system, *turns]) > limit:
        turns = turns[1:]
    return [*system, *turns]
