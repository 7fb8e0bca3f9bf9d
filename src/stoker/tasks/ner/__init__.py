"""Named entities: CoNLL columns, JSON lines with spans or tags, windows over long texts, entity F1 by seqeval."""
