# Of two runs side by side: "step <n> loss <a> step <n> loss <b>". A loss is the mean over the ranks
# of float32 means, and after k steps float32 weights have gone apart by rounding: 1e-4 of it.
$1 == "step" && $5 == "step" {
  ++compared
  if ($4 - $8 > 1e-4 * $4 || $8 - $4 > 1e-4 * $4) { print "differs: " $0; bad = 1 }
  if (compared == 1) first = $4
  last = $4
}
END {
  if (!compared || last >= first) { print "the loss does not fall"; bad = 1 }
  if (!bad) print "the losses are the same on one process and on several"
  exit bad
}
