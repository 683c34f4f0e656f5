// Of pages that contain what was searched for, guides come first and records last.
var Scorer = {
  score: ([docname, , , , score]) => {
    const order = { start: 4, guides: 3, gallery: 2, reference: 1, measured: -3, changes: -4, contributing: -4 };
    return score + (order[docname.split("/")[0]] || 0);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
