"""The order in which all pairs of ranks exchange: a round-robin tournament."""


def rounds_of(ranks: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs, so that each pair of ranks meets once.

    The circle method: one player stays, and the others move on by one place after each round. With
    an odd number of ranks one of them rests in each round.

    Args:
        ranks: number of ranks.

    Returns:
        The rounds, N - 1 for an even number N of ranks and N for an odd one. The lower rank of a
        pair is the first.
    """
    resting = -1
    circle = list(range(ranks)) + [resting] * (ranks % 2)
    rounds: list[list[tuple[int, int]]] = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        meetings = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in meetings if resting not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds
