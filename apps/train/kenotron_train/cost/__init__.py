"""Memory and transfers of a config by arithmetic, and the machine that they must fit."""
