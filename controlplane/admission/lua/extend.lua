-- Take more for a lease, or nothing, and keep it for another ttl: {id, holder, ttl, charges, fence, step, lease epoch,
-- expiry known to the caller}. A repeated step takes nothing again. A lease that has expired gets its slots back only
-- if they are free; one that was written off is said to be lost, so that its holder makes it whole first.
local id, holder, ttl, charges, fence, step, lease_epoch, expires = unpack(request)
tidy()
local record = read_record(id)
if not record then return answer('ended', is_lost(lease_epoch, expires) and 'lost' or 'expired') end
if record[STATE] == SETTLED then return answer('ended', 'settled') end
if is_fenced(record, holder, fence) then return answer('ended', 'fenced') end
for _, part in ipairs(record[PARTS]) do
  if part[GONE] then return answer('ended', 'lost') end
end
if record[EXPIRES] <= now then
  for i, charge in ipairs(charges) do
    if charge[1] == HELD then charge[2] = 1 end
  end
end
local repeated = step <= record[STEP]
local standings, places, refusals, cold, inside = judge(charges)
if not repeated then
  local refused = obstacle(standings, refusals, cold, inside)
  if refused then return refused end
end
record[EXPIRES] = math.max(record[EXPIRES], now + ttl)
for _, part in ipairs(record[PARTS]) do
  if part[COUNTER] == HELD then held_add(part[KEY], id, record[EXPIRES]) end
end
if not repeated then
  for i, charge in ipairs(charges) do
    if charge[1] == HELD then charge[2] = 0 end
  end
  record[STEP] = step
  take(charges, standings, places, id, record)
end
write_live(id, record)
return answer('granted', epoch, now, repeated and 1 or 0, record[FENCE], record[TAKEN], record[EXPIRES], standings)
