"""The key ``partial_rotary_factor`` of families whose positions turn a part of a head."""


def share_problems(share: float, width: int) -> list[str]:
    """Name a share of the ``width`` features of a head that is not an even number of them."""
    if 0 < share <= 1 and int(width * share) >= 2 and int(width * share) % 2 == 0:
        return []
    return [
        f"partial_rotary_factor: {share} was given; of the {width} features of a head it makes "
        f"{int(width * share)}, rounded down; it must be an even number from 2 to {width}"
    ]


def small_share(share: float, width: int) -> float:
    """Return about the same share of a head of ``width`` features, an even number of them."""
    return max(2, int(width * share) // 2 * 2) / width
