"""What refold did, why, and what it gained: plain data, printed as text or JSON."""

from .model import GraphReport as GraphReport
from .model import Report as Report
from .model import RewriteReport as RewriteReport
from .text import render as render
