"""ATen graphs in index notation: read what an axis means, build nodes, cut regions out, count their cost."""
