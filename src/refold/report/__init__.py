"""What refold did, why, and what it gained: plain data, printed as text or JSON."""

from .model import GraphReport as GraphReport
from .model import RewriteReport as RewriteReport
from .report import Report as Report
from .text import render as render
