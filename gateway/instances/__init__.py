"""Where a model runs when it does not run here: processes of its own. May import net and codecs."""
