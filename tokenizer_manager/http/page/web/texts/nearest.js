// `nearest`: vectors by the cosine of their angle to another one. Pure.

export function nearest(vector, others) {
  return others.map((other, index) => ({ index, score: cosine(vector, other) })).sort((a, b) => b.score - a.score);
}

export function cosine(one, other) {
  let product = 0, oneSquared = 0, otherSquared = 0;
  for (let i = 0; i < one.length; i++) {
    product += one[i] * other[i];
    oneSquared += one[i] * one[i];
    otherSquared += other[i] * other[i];
  }
  const lengths = Math.sqrt(oneSquared * otherSquared);
  return lengths > 0 ? product / lengths : 0;
}
