"""Decisions about graphs and regions, remembered: how they are named, where they are kept, and what pins them."""

from .keys import Key as Key
from .keys import Unnameable as Unnameable
from .keys import digest as digest
from .keys import name_program as name_program
from .keys import place as place
from .keys import versions as versions
from .plan import Plan as Plan
from .store import Store as Store
from .store import folder_for as folder_for
from .store import forget as forget
